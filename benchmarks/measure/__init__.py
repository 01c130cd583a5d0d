"""What benchmarks share: statistics, the load of others, rows, records, tables, the chart."""
