"""`jackfield check`: which role runs where, in which layout and with how much memory, before anything is started."""
