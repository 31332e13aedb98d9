"""What programs hold: the blocking store, the async one, and the exchange of values between writers."""
