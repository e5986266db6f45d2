"""A decode step as a file that runs without semkv: in ONNX's standard operators, or as an AOTInductor package."""
