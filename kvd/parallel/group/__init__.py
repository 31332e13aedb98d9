"""One model on several devices, and the way of its gradients to a store and of the weights back."""
