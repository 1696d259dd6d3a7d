"""The record and the log on which all members agree: one server over torch's TCPStore, or etcd."""
