"""The last module that the process imports whose forks the tests are: their collectors need not look at what it has."""

import gc

gc.freeze()
