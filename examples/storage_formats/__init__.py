"""Storage formats on an object store, measured: is it necessary to convert a dataset to shards?

``python -m examples.storage_formats`` writes the same samples as single objects, as TFRecord files and as WebDataset
archives, trains on each of them with torch's loader and with :class:`~rpcdataloader.RPCDataloader`, and compares the
samples per second with what the storage can deliver. ``docs/studies.md`` has the results and explains them.
"""
