"""The engine methods that serve a client's request, and count as in flight while they run (R2.74).

The in-flight count rises when a replica is picked and falls when the response is complete. So a tracked
method may be called only through a client that the pool of the inference gateway provides (`ClientPool`); any
other client lacks it. A method in neither set cannot be called at all, so adding a method means choosing its
set.
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
