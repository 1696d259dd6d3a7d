"""Keys of a run (`settings`), and reading them from YAML and the command line (`reading`). Nothing here imports torch
or opens a data set.
"""
