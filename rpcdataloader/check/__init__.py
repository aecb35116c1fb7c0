"""``python -m rpcdataloader.check MODULE:FACTORY``: does this dataset work remotely, and how fast?"""
