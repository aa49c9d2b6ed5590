# SPDX-License-Identifier: Apache-2.0
from denoised.v1 import image_generation_pb2 as _image_generation_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeleteAliasRequest(_message.Message):
    __slots__ = ["alias"]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: str
    def __init__(self, alias: _Optional[str] = ...) -> None: ...

class DeleteAliasResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ["directory", "keep_current", "name", "unload_previous", "version"]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    KEEP_CURRENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    directory: str
    keep_current: bool
    name: str
    unload_previous: bool
    version: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., version: _Optional[str] = ..., keep_current: bool = ..., unload_previous: bool = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ["model"]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _image_generation_pb2.Model
    def __init__(self, model: _Optional[_Union[_image_generation_pb2.Model, _Mapping]] = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ["alias", "target"]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    alias: str
    target: str
    def __init__(self, alias: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class SetAliasResponse(_message.Message):
    __slots__ = ["model"]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _image_generation_pb2.Model
    def __init__(self, model: _Optional[_Union[_image_generation_pb2.Model, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ["name"]
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = []
    def __init__(self) -> None: ...
