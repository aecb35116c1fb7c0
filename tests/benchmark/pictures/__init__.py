"""The pictures of the documents, drawn from recorded data: ``make figures``."""
