window.BENCHMARK_DATA = {
  "lastUpdate": 1767409445000,
  "repoUrl": "https://github.com/acme/fib",
  "entries": {
    "Rust": [
      {
        "commit": {
          "author": {
            "email": "a@acme.org",
            "name": "Ann",
            "username": "ann"
          },
          "committer": {
            "email": "noreply@github.com",
            "name": "GitHub",
            "username": "web-flow"
          },
          "distinct": true,
          "id": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
          "message": "Faster fib\n\nWith a table.",
          "timestamp": "2026-01-02T04:00:00+01:00",
          "tree_id": "dddddddddddddddddddddddddddddddddddddddd",
          "url": "https://github.com/acme/fib/commit/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
        },
        "date": 1767323045000,
        "tool": "cargo",
        "benches": [
          {
            "name": "fib_20",
            "range": "\u00b1 1312",
            "unit": "ns/iter",
            "value": 24512
          }
        ]
      },
      {
        "commit": {
          "author": {
            "email": "a@acme.org",
            "name": "Ann",
            "username": "ann"
          },
          "committer": {
            "email": "noreply@github.com",
            "name": "GitHub",
            "username": "web-flow"
          },
          "distinct": true,
          "id": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
          "message": "Docs",
          "timestamp": "2026-01-02T04:00:00+01:00",
          "tree_id": "dddddddddddddddddddddddddddddddddddddddd",
          "url": "https://github.com/acme/fib/commit/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
        },
        "date": 1767409445000,
        "tool": "cargo",
        "benches": [
          {
            "name": "fib_20",
            "range": "\u00b1 900",
            "unit": "ns/iter",
            "value": 26001
          }
        ]
      }
    ],
    "Python": [
      {
        "commit": {
          "author": {
            "email": "a@acme.org",
            "name": "Ann",
            "username": "ann"
          },
          "committer": {
            "email": "noreply@github.com",
            "name": "GitHub",
            "username": "web-flow"
          },
          "distinct": true,
          "id": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
          "message": "Faster fib\n\nWith a table.",
          "timestamp": "2026-01-02T04:00:00+01:00",
          "tree_id": "dddddddddddddddddddddddddddddddddddddddd",
          "url": "https://github.com/acme/fib/commit/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
        },
        "date": 1767323045000,
        "tool": "pytest",
        "benches": [
          {
            "name": "test_fib",
            "value": 41535.29,
            "unit": "iter/sec",
            "range": "stddev: 0.0000023",
            "extra": "mean: 24.07 usec\nrounds: 16400"
          }
        ]
      }
    ],
    "Custom": [
      {
        "commit": {
          "author": {
            "email": "a@acme.org",
            "name": "Ann",
            "username": "ann"
          },
          "committer": {
            "email": "noreply@github.com",
            "name": "GitHub",
            "username": "web-flow"
          },
          "distinct": true,
          "id": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
          "message": "Docs",
          "timestamp": "2026-01-02T04:00:00+01:00",
          "tree_id": "dddddddddddddddddddddddddddddddddddddddd",
          "url": "https://github.com/acme/fib/commit/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
        },
        "date": 1767409445000,
        "tool": "customSmallerIsBetter",
        "benches": [
          {
            "name": "cpu load",
            "unit": "Percent",
            "value": 50
          }
        ]
      }
    ]
  }
}