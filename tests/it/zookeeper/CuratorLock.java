import java.nio.file.*;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.*;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** Takes a dlock's lock by Curator's own recipe: PORT PATH hold STARTED GO, or PORT PATH try. */
public class CuratorLock {
    public static void main(String[] args) throws Exception {
        CuratorFramework client =
            CuratorFrameworkFactory.newClient("127.0.0.1:" + args[0], 10_000, 10_000, new RetryOneTime(100));
        client.start();
        InterProcessMutex mutex = new InterProcessMutex(client, args[1]);
        if (args[2].equals("hold")) {
            mutex.acquire();
            Files.createFile(Path.of(args[3]));
            while (!Files.exists(Path.of(args[4]))) {
                Thread.sleep(10);
            }
        } else if (!mutex.acquire(0, TimeUnit.SECONDS)) {
            client.close();
            System.exit(75);
        }
        mutex.release();
        client.close();
    }
}
