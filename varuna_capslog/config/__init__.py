"""Keys of a run (`settings`), and reading them from YAML and the command line (`reading`). No module here imports torch
or opens a data set.
"""
