"""Language models: implicit, explicit, and the layers that they iterate."""
