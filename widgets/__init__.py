"""Views for notebooks; the folder stands at the top level and imports as `seedkit.widgets`."""
