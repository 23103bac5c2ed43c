"""`jackfield report RUN`: one HTML page about a run."""
