"""The election of the leading master, decided without I/O and performed in etcd."""
