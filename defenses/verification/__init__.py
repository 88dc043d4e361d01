"""Inference verification: did the provider run the model and the sampler that it advertises?"""
