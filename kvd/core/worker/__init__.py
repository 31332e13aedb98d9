"""The worker: it turns the calls of a program into requests to servers, and their answers into results."""
