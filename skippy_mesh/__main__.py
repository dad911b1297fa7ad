from skippy_mesh.cli import entry

entry()
