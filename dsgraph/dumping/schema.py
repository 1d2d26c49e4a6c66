"""`python -m dsgraph.dumping.schema > docs/dump.schema.json`: the JSON schemas of a dump's files."""

import json

from .records import CompileRecord, GraphRecord, json_schema

if __name__ == "__main__":
    print(json.dumps({"compile": json_schema(CompileRecord), "graph": json_schema(GraphRecord)}, indent=1))
