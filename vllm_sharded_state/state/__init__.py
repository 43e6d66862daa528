"""What a loaded model holds: its tensors, hidden state and host mirrors, in source and runtime layout."""
