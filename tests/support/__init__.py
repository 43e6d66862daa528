"""What the tests share: snapshots, batches of model-level jobs, engines in processes of their own."""
