"""What people look at: tables and figures made from records, never from anything else."""
