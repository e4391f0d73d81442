"""A surrogate in other people's programs: files of torch.export, ONNX and timm, each measured as it was written."""
