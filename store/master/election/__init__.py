"""Which of several masters leads, decided without I/O and performed in etcd."""
