"""What is measured. A stage has probes, one per side and question; rounds go through all of them in turn."""
