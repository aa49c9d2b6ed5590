# SPDX-License-Identifier: Apache-2.0
"""Renders kustomizations without kubectl, which neither Debian nor PyPI has. It supports what deploy/k8s uses
and refuses everything else by name. manifests.py compares it with `kubectl kustomize` if there is one. One
difference is wanted: names of ConfigMaps get no hash."""

import copy
import pathlib

import yaml

KNOWN = {
    "apiVersion", "kind", "resources", "components", "labels", "configMapGenerator", "patches", "images",
    "configurations",
}
# Lists in which a strategic merge patch finds its element by a key.
MERGE_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "volumeMounts": "mountPath"}


def render(directory):
    """The resources of a kustomization, as kubectl would apply them."""
    return Kustomization(pathlib.Path(directory)).build([])


def read(file):
    return [document for document in yaml.safe_load_all(file.read_text(encoding="utf-8")) if document]


class Kustomization:
    def __init__(self, directory):
        self.directory = directory
        (self.fields,) = read(directory / "kustomization.yaml")
        unknown = set(self.fields) - KNOWN
        if unknown:
            raise SystemExit(f"{directory}/kustomization.yaml: deploy/test/kustomize.py does not support {sorted(unknown)}")

    def build(self, resources):
        """Adds its resources to those before it, of which a component patches all."""
        for name in self.fields.get("resources", []):
            path = self.directory / name
            resources = resources + (render(path) if path.is_dir() else read(path))
        for name in self.fields.get("components", []):
            resources = Kustomization(self.directory / name).build(resources)
        for generator in self.fields.get("configMapGenerator", []):
            resources = self.with_config_map(resources, generator)
        for entry in self.fields.get("patches", []):
            resources = patched(resources, entry)
        for entry in self.fields.get("labels", []):
            for resource in resources:
                add_labels(resource, entry)
        for image in self.fields.get("images", []):
            for resource in resources:
                set_image(resource, image)
        return resources

    def with_config_map(self, resources, generator):
        data = dict(literal.split("=", 1) for literal in generator.get("literals", []))
        for name in generator.get("files", []):
            data[pathlib.Path(name).name] = (self.directory / name).read_text(encoding="utf-8")
        if generator.get("behavior") == "merge":
            result = copy.deepcopy(resources)
            one(result, "ConfigMap", generator["name"])["data"].update(data)
            return result
        metadata = {"name": generator["name"]}
        if "labels" in generator.get("options", {}):
            metadata["labels"] = generator["options"]["labels"]
        return resources + [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}]


def one(resources, kind, name):
    (found,) = [r for r in resources if r["kind"] == kind and r["metadata"]["name"] == name]
    return found


def patched(resources, entry):
    target = entry["target"]
    patch = yaml.safe_load(entry["patch"])
    result, matched = [], False
    for resource in resources:
        if resource["kind"] != target["kind"] or target.get("name", resource["metadata"]["name"]) != resource["metadata"]["name"]:
            result.append(resource)
            continue
        matched = True
        if isinstance(patch, list):
            result.append(json_patched(resource, patch))
        elif patch.get("$patch") != "delete":
            result.append(merged(resource, patch))
    if not matched:
        raise SystemExit(f"a patch of {target} patches nothing")
    return result


def json_patched(resource, operations):
    """RFC 6902, without its operations test, move and copy."""
    result = copy.deepcopy(resource)
    for operation in operations:
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        at = result
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        key = int(last) if isinstance(at, list) and last != "-" else last
        if operation["op"] == "remove":
            del at[key]
        elif operation["op"] == "replace":
            at[key]  # must exist
            at[key] = operation["value"]
        elif operation["op"] == "add" and isinstance(at, list):
            at.insert(len(at) if key == "-" else key, operation["value"])
        elif operation["op"] == "add":
            at[key] = operation["value"]
        else:
            raise SystemExit(f"deploy/test/kustomize.py does not support {operation}")
    return result


def merged(value, patch, field=""):
    """A strategic merge patch."""
    if isinstance(value, dict) and isinstance(patch, dict):
        result = dict(value)
        for name, change in patch.items():
            if change is None:
                result.pop(name, None)
            else:
                result[name] = merged(result.get(name), change, name)
        return result
    if isinstance(value, list) and isinstance(patch, list) and field in MERGE_KEYS:
        key = MERGE_KEYS[field]
        changes = {change[key]: change for change in patch}
        result = [merged(item, changes.pop(item[key])) if item[key] in changes else item for item in value]
        return result + list(changes.values())
    return copy.deepcopy(patch)


def add_labels(resource, entry):
    pairs = entry["pairs"]
    resource["metadata"].setdefault("labels", {}).update(pairs)
    if not entry.get("includeSelectors"):
        return
    spec = resource.get("spec", {})
    if resource["kind"] == "Service":
        spec.setdefault("selector", {}).update(pairs)
    if resource["kind"] == "Deployment":
        spec.setdefault("selector", {}).setdefault("matchLabels", {}).update(pairs)
        spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(pairs)
    if resource["kind"] in ("NetworkPolicy", "PodDisruptionBudget"):
        selector = spec.get("podSelector" if resource["kind"] == "NetworkPolicy" else "selector", {})
        if "matchLabels" in selector:
            selector["matchLabels"].update(pairs)


def set_image(value, image):
    """In the containers of a resource, however deep."""
    if isinstance(value, list):
        for item in value:
            set_image(item, image)
    if not isinstance(value, dict):
        return
    for field, inner in value.items():
        set_image(inner, image)
        for container in inner if field in ("containers", "initContainers") and isinstance(inner, list) else []:
            if container.get("image", "").split(":")[0] == image["name"]:
                name = image.get("newName", image["name"])
                tag = image.get("newTag", container["image"].partition(":")[2])
                container["image"] = f"{name}:{tag}" if tag else name
