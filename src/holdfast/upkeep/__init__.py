"""Background duties: promote, reclaim, project, reconcile, prune.

Any number of processes may run them at once.
"""
