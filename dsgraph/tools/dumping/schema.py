"""`python -m dsgraph.tools.dumping.schema > docs/reference/dump.schema.json`: the JSON schemas of a dump's files."""

import json

from dsgraph.utils.json_records import json_schema

from .records import CompileRecord, GraphRecord

if __name__ == "__main__":
    print(json.dumps({"compile": json_schema(CompileRecord), "graph": json_schema(GraphRecord)}, indent=1))
