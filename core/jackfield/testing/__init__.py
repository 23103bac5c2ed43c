"""Public test kit for plugin authors: conformance classes, tiny models and fakes."""
