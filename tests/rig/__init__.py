"""Tools that prove the membership protocol: a model of the world that checks every rule, an explorer of all
interleavings, and a generator of random histories. They work with any `Job` and are no part of a training run.
"""
