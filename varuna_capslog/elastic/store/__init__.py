"""Store of a run, with the newest generation and the common log: on the run's own server, or in etcd."""
