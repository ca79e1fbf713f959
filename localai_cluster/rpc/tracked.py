"""Which calls of an engine are somebody's request, and count as such while they run (R2.74).

A request is counted in when its replica is picked and out when its answer is complete, so a tracked call may
be made only with a client that the pool of the inference edge hands out (`ClientPool`); any other client does
not have it. A method that stands in neither list cannot be called at all: who adds one decides.
"""

TRACKED = frozenset(
    {
        *("Predict", "PredictStream", "Embedding", "GenerateImage", "UpscaleImage", "GenerateVideo"),
        *("Generate3D", "TTS", "TTSStream", "SoundGeneration", "AudioTranscription"),
        *("AudioTranscriptionStream", "Detect", "Depth", "Rerank", "VAD", "Diarize", "FaceVerify"),
        *("FaceAnalyze", "VoiceVerify", "VoiceAnalyze", "VoiceEmbed", "TokenClassify", "Score"),
        *("SoundDetection", "AudioEncode", "AudioDecode", "AudioTransform"),
    }
)
UNTRACKED = frozenset(
    {
        *("Health", "LoadModel", "Status", "Free", "TokenizeString", "Detokenize", "GetMetrics"),
        *("ModelMetadata", "StoresSet", "StoresDelete", "StoresGet", "StoresFind"),
    }
)
