//! What is checked in although it can be generated is what would be generated now.

use std::path::Path;
use std::process::Command;

fn checked_in(path: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// protoc/protoc hands out this file instead of compiling etcd-client's definitions.
#[test]
fn the_descriptors_of_etcd_client_are_what_protoc_makes_of_them() {
    // What was built is here already: nothing has to be fetched for other platforms.
    let here = ["--frozen", "--filter-platform", "host-tuple"];
    let metadata = Command::new(env!("CARGO")).args(["metadata", "--format-version", "1"]).args(here).output().unwrap();
    assert!(metadata.status.success(), "{}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let client = packages.iter().find(|package| package["name"] == "etcd-client").unwrap();
    let root = Path::new(client["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned();
    let out = tempfile::NamedTempFile::new().unwrap();
    let files = [
        "etcd/api/authpb/auth.proto",
        "etcd/api/etcdserverpb/rpc.proto",
        "etcd/api/mvccpb/kv.proto",
        "etcd/server/etcdserver/api/v3election/v3electionpb/v3election.proto",
        "etcd/server/etcdserver/api/v3lock/v3lockpb/v3lock.proto",
    ];
    let mut protoc = Command::new("protoc");
    protoc.current_dir(root).arg("--include_imports").arg("-o").arg(out.path()).args(["-I", "proto"]);
    assert!(protoc.args(files.map(|file| format!("proto/{file}"))).status().unwrap().success());
    assert!(std::fs::read(out.path()).unwrap() == checked_in("protoc/etcd.binpb"), "etcd-client has other definitions");
}
