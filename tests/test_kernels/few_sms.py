"""Launches as if on a GPU of few SMs."""

from typing import Any

import pytest
import torch

from nvfp4_kernels.devices import DeviceFacts, device_facts


class FewSms(DeviceFacts):
    """Facts of a GPU whose clusters may lie on any SMs."""

    __slots__ = ()

    def max_clusters(self, ctas: int) -> int:
        return self.sms // ctas


def use_sms(module: Any, sms: int, patch: pytest.MonkeyPatch) -> None:
    """Make launches of ``module`` see a device of ``sms`` SMs."""

    def facts(device: torch.device) -> DeviceFacts:
        return FewSms(*device_facts(device)._replace(sms=sms))

    patch.setattr(module, "device_facts", facts)
