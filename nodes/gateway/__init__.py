"""The hot path: from an inference request to an engine and back."""
