"""The client's side of a deployment: which client a node is, what it computes and what it stores."""
