"""`jackfield new KIND NAME`: a complete package of a plugin, with tests that pass, or a single file."""
