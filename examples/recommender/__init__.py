"""A recommender with up to a thousand sparse features: from Parquet files to a model that graph passes make faster.

``python -m examples.recommender`` trains it, ``python -m examples.recommender.measure`` prints what each part gains.
``docs/studies.md`` explains both.
"""
