"""The codes of rejections are gRPC's."""

from __future__ import annotations

import grpc

from scheduler_svc.core import rejection


def test_codes_are_those_of_grpc() -> None:
    codes = {name.removeprefix("CODE_"): value for name, value in vars(rejection).items() if name.startswith("CODE_")}
    assert len(codes) == 6
    assert codes == {name: grpc.StatusCode[name].value[0] for name in codes}
    assert rejection.invalid("n", "0 samples").code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
