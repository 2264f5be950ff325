const { spawnSync } = require("child_process");
const { join } = require("path");
const ended = spawnSync("sh", [join(__dirname, "release.sh")], { stdio: "inherit" });
process.exitCode = ended.status ?? 1;
