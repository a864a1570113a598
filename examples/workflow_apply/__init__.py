"""Reliable workflows with a web service, a model, MongoDB and holdfast."""
