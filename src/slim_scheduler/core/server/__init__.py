"""One server: its queue, its batches and its model instances."""
