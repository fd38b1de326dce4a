"""The same rounds of FedAvg here and in other frameworks."""
