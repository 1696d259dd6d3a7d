"""The record and the log on which all members agree: the run's own server, or etcd."""
