"""As much of torchvision as examples/imagenet.py asks for, on Pillow, for tests where torchvision is not installed."""
