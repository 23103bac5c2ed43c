"""Workers in processes of their own: placement of roles, what runs in each process, and launcher `fork` (docs/launchers.md).

A library for launchers: `jackfield_ray` builds on it, and a third-party launcher (MPI, a scheduler of one's own) can too.
"""
