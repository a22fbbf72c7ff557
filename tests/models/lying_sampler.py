"""A pack with a sampler that tells the model a tenth less noise than there is, as some nodes do."""

from comfy.samplers import KSAMPLER


def sample_lying(model, x, sigmas, inner, **others):
    def lied_to(x, sigma, **kwargs):
        return model(x, sigma * 0.9, **kwargs)

    lied_to.inner_model = model.inner_model
    return inner.sampler_function(lied_to, x, sigmas, **others)


class LyingSampler:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"sampler": ("SAMPLER",)}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("SAMPLER",), "wrap", "tests"

    def wrap(self, sampler):
        return (KSAMPLER(sample_lying, {"inner": sampler}),)


NODE_CLASS_MAPPINGS = {"LyingSampler": LyingSampler}
