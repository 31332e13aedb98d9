"""`AllReduceParameter`: a vector of parameters of which every worker owns one slice."""
