"""Indexes over templates: views of the storage that can be thrown away and built again."""
