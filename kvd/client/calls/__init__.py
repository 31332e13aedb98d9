"""What a call may say and what it returns: keys, values, checks, handles, the memory budget of pushes."""
