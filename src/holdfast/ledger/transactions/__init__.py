"""What people do, step by step: statements out, rows in, no store in sight."""
